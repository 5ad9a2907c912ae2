"""``lamella profile``: measures a model and its hand-overs on this machine."""
