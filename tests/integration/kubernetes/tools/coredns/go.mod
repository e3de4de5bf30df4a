module tools

go 1.24

require github.com/coredns/coredns v1.13.1
