"""``lamella profile --operators``: what each operator of a model's pass takes on a device, for any shard."""
