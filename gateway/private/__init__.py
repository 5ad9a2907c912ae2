"""The gateway's private port: the mesh as an operator sees it, and what an operator may ask for."""
