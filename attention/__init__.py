"""The room of the weight-free attention workers."""
