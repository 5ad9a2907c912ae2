"""Pure decisions, one a file, shared by the live scheduler and the simulator."""
