"""What is shown of serving: a live dashboard, and reports of recorded runs (matplotlib, extra `bench`)."""
