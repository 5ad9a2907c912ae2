"""What a model costs on devices, and how it is cut at its attentions."""
