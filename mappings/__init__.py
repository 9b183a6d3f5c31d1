"""Tables of tensor names, shapes and transforms, one module a family. Data only."""
