"use strict";
(function () {
  const form = document.querySelector(".controls");
  if (!form) return;
  const list = document.querySelector(".cards");
  const cards = Array.from(list.children);
  const output = form.querySelector("output");
  const value = (name) => (form.elements[name] ? form.elements[name].value : "");
  const share = (card, when, kind) => parseFloat(card.getAttribute("data-" + when + "-" + kind));

  function change(card, kind) {
    const difference = share(card, "after", kind) - share(card, "before", kind);
    return Number.isFinite(difference) ? difference : 0;
  }

  function latest(card, kind) {
    const after = share(card, "after", kind);
    return Number.isFinite(after) ? after : share(card, "before", kind);
  }

  function fits(card, kind, wanted) {
    if (!Number.isFinite(share(card, "before", kind)) && !Number.isFinite(share(card, "after", kind))) return false;
    const moved = change(card, kind);
    if (wanted === "better") return moved > 1e-9;
    if (wanted === "worse") return moved < -1e-9;
    return wanted !== "same" || Math.abs(moved) <= 1e-9;
  }

  const orders = {
    "": () => (a, b) => a.dataset.place - b.dataset.place,
    change: (kind) => (a, b) => Math.abs(change(b, kind)) - Math.abs(change(a, kind)),
    worst: (kind) => (a, b) => latest(a, kind) - latest(b, kind),
    best: (kind) => (a, b) => latest(b, kind) - latest(a, kind),
  };

  function show() {
    const kind = value("kind");
    let shown = 0;
    cards.slice().sort(orders[value("order")](kind)).forEach((card) => list.append(card));
    for (const card of cards) {
      card.hidden = !fits(card, kind, value("change"));
      shown += card.hidden ? 0 : 1;
      for (const row of card.querySelectorAll("tr[data-kind]")) {
        row.classList.toggle("aside", kind !== "atoms" && row.dataset.kind !== kind);
      }
    }
    output.textContent = shown + " of " + cards.length + " shown";
  }

  form.hidden = false;
  form.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
})();
