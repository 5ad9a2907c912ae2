"""From a trace, prices and objectives to a deployment: the papers' searches over the simulator."""
