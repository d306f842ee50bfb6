"""What sandboxes cost here, beside what a plain use of the Docker Engine costs, in turns on one stack."""
