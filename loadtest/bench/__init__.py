"""The benchmark: "say hi" in a closed loop through the public API, beside a plain baseline that runs the same agent."""
