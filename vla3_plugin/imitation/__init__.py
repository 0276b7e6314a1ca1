"""Demonstrations by scripted experts, and behaviour cloning from them."""
