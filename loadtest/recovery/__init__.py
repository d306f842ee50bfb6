"""How fast runs recover and end, seen by their clients: streams that go on after an executor's death, and cancels."""
