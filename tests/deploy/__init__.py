"""The files to deploy workers with, run for real as far as a test can."""
