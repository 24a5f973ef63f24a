"""How worker processes end: real `dramatiq` commands on real brokers, told to stop in every way that there is."""
