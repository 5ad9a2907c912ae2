"""Tests of the load generator, against servers that speak HTTP over real sockets."""
