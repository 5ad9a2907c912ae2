"""Transfers between real processes on 127.0.0.1, over both paths."""
