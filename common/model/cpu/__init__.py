"""Kernels for the few rows of a decode step on a CPU, compiled by numba.

A step of few rows waits for memory and for calls: torch's operators cost 5 to 25 µs each, and a layer has
some thirty small ones. These are the fused ones, found by patterns in the captured graph
(``common.model.fusions``) or called by linears and attention. Many rows stay with torch, but for products
in fp32 where these are as quick (``common.model.linears``). ``atoms`` are what numba lacks,
``kernels``, ``products``, its ``blocks``, and ``paged_attention`` are code over addresses, ``panels`` how
weights lie for it, ``library`` keeps it compiled, ``crew`` shares one kernel's work with a second core.
"""
