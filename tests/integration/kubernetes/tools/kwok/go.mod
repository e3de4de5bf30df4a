module tools

go 1.24

require sigs.k8s.io/kwok v0.7.0
