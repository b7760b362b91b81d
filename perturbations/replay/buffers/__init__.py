"""Replay buffers: the contract, and one file for each, named like it."""
