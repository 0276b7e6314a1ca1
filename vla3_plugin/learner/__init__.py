"""The learner: engines, actor worker and the weight plane."""
