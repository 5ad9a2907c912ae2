"""Machine code of the simulator and the decisions it drives, made of their source."""
