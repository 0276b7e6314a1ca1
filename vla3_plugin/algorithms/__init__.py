"""Advantages, losses, granularities and filters: pure tensor functions."""
