"""Predicts how many tokens a request will draw, beside its prefill (TetriInfer 3.3.2, Aladdin 2.3)."""
