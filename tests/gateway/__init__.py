"""The gateway's parts alone, and the gateway process in a mesh of emulated instances."""
