"""Vision-language-action policies behind one interface."""
