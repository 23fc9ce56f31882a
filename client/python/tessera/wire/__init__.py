"""What the server understands: the protocol, addresses and options, errors, retries."""
