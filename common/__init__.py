"""Words and wires that every room shares; the only importers of NATS, Redis and Mooncake."""
