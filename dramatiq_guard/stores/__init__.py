"""Where what must outlive a process is kept.  Stores know neither Dramatiq nor telemetry."""
