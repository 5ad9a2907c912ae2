"""Words and wires every room shares: values, messages, errors, and the only importers of NATS, Redis, Mooncake."""
