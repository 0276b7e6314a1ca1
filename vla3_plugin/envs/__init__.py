"""Simulators behind one interface, each in a child interpreter of its own."""
