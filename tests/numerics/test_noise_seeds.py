from __future__ import annotations

import hashlib

import torch

from cast_engine.numerics import noise


def test_seed_is_the_documented_hash():
    digest = hashlib.sha256(b'["member",7,3,"0123456789ab",5]').digest()
    assert noise.member_seed(7, 3, "0123456789ab", 5) == int.from_bytes(digest[:8], "big") >> 1
    digest = hashlib.sha256(b'["step",12,2]').digest()
    assert noise.step_seed(12, 2) == int.from_bytes(digest[:8], "big") >> 1


def test_every_argument_matters_and_nothing_collides():
    base = (7, 3, "0123456789ab", 5)
    others = [(8, *base[1:]), (7, 4, *base[2:]), (7, 3, "0123456789ac", 5), (*base[:3], 6), (3, 7, *base[2:])]
    seeds = {noise.member_seed(*a) for a in [base, *others]}
    assert len(seeds) == 6
    many = [noise.member_seed(0, r, f"{p:012x}", m) for r in range(8) for p in range(16) for m in range(16)]
    assert all(0 <= s < 2**63 for s in many)
    assert len({s % 2**32 for s in many}) == len(many)  # what the generator sees of a seed
    assert noise.hash_seed(1) != noise.hash_seed("1")
    assert noise.hash_seed("a", "bc") != noise.hash_seed("ab", "c")


def test_initial_noise_is_the_stock_generator_draw():
    seed = noise.member_seed(0, 0, "0123456789ab", 0)
    want = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(seed))
    got = noise.initial(seed, (1, 16, 4, 4))
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


def test_draws_do_not_depend_on_order_or_on_the_global_generator():
    seeds = [noise.member_seed(0, 0, "0123456789ab", m) for m in range(4)]
    one = [noise.step_noise(s, 1, (8, 4)) for s in seeds]
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    two = [noise.step_noise(s, 1, (8, 4)) for s in reversed(seeds)][::-1]
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_steps_and_members_have_noise_of_their_own():
    seed = noise.member_seed(0, 0, "0123456789ab", 0)
    draws = [noise.initial(seed, (32, 8)), noise.initial(noise.member_seed(0, 0, "0123456789ab", 1), (32, 8))]
    draws += [noise.step_noise(seed, i, (32, 8)) for i in range(4)]
    flat = torch.stack(draws).flatten(1)
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlation.abs().max() < 0.25  # 4 sigma of 256 values
    assert flat.std() > 0.9
