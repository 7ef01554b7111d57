"""What a user learns before loading anything: checks of the machine, plans of models, speed as measured."""
