"""The arithmetic: pure functions of tensors that know nothing of models."""
