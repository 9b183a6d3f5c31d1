"""What tests share: checkpoint makers, golden lists, a hand-written reference, faults."""
