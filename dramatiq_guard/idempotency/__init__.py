"""One effect, however many deliveries: what a claim is to the actor that runs under it, and how it is kept alive."""
