"""What benchmarks share: facts of the machine, corpora, hosts, charts."""
