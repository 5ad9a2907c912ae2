"""The model: captured, cut into slices, run, sampled."""
