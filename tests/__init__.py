"""Tests mirror the tree; everything here runs against real servers and processes."""
