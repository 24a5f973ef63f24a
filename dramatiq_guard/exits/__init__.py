"""How a worker process ends: by whom, when, with which code; and which messages end it."""
