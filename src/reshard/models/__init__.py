"""Public models as data: names, shapes, what each tensor is for, and how trainers and engines lay them out."""
