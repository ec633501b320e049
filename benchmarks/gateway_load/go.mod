module npufleet.dev/benchmarks/gateway_load

go 1.26
