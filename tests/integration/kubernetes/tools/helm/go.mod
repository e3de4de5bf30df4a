module tools

go 1.24

require helm.sh/helm/v3 v3.22.0
