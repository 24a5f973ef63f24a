"""What a message's end owes, and doing it: the settle barrier, the consumers that hold messages, their threads."""
