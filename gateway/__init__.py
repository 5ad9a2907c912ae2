"""The room clients talk to: HTTP and SSE in, decisions and tokens over the bus."""
