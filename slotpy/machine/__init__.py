"""What machine this is: memory, GPU, control groups, pressure; and the machines that can be planned for by name."""
