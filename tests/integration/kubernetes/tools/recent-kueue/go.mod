module tools

go 1.24

require sigs.k8s.io/kueue v0.17.1
