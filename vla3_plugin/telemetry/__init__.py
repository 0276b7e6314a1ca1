"""What a user sees: metrics, video, report."""
