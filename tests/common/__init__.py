"""Tests of the words and wires."""
