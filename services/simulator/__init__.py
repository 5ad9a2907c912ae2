"""The mesh in virtual time: the live decisions, driven by models of performance and of links."""
