"""The embedded default: a world of coloured shapes, its exact verifier and its tiny trained models."""
