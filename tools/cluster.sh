#!/bin/bash
# Several hosts on one machine: network namespaces on one bridge, with links of a limited rate, and Open MPI across
# them. Needs root and iproute2.
#
# usage: tools/cluster.sh up NAME HOSTS              hosts NAMEh0, NAMEh1, ... (NAME of at most 10 letters)
#        tools/cluster.sh rate NAME RATE             limits each link, both ways: 500mbit, say; none: no limit
#        tools/cluster.sh run NAME RANKS COMMAND...  RANKS ranks a host, neighbours on the same host
#        tools/cluster.sh down NAME
set -euo pipefail

subnet=10.77.0  # host i has the address $subnet.(i + 1); nothing outside the bridge sees it
action=$1 name=$2
shift 2

hosts() { ip netns list | awk -v name="$name" '$1 ~ "^" name "h[0-9]+$" { print $1 }' | sort -V; }

# on HOST COMMAND...: as the host of that number, under its name.
on() {
  local host=${name}h$1
  shift
  # shellcheck disable=SC2016 # expanded there
  ip netns exec "$host" unshare --uts bash -c 'hostname "$1"; shift; exec "$@"' on "$host" "$@"
}

# limit RATE DEVICE COMMAND...: the queue of DEVICE, with COMMAND in front of tc.
limit() {
  local rate=$1 device=$2
  shift 2
  "$@" tc qdisc del dev "$device" root 2>/dev/null || true
  if [[ $rate != none ]]; then "$@" tc qdisc add dev "$device" root tbf rate "$rate" burst 32kb latency 100ms; fi
}

case $action in
  up)
    ip link add "${name}b" type bridge
    ip link set "${name}b" up
    for ((i = 0; i < $1; i++)); do
      ip netns add "${name}h$i"
      ip link add "${name}v$i" type veth peer name eth0 netns "${name}h$i"
      ip link set "${name}v$i" master "${name}b" up
      ip -n "${name}h$i" address add $subnet.$((i + 1))/24 dev eth0
      ip -n "${name}h$i" link set eth0 up
      ip -n "${name}h$i" link set lo up
    done
    ;;
  rate)
    for host in $(hosts); do
      limit "$1" eth0 ip netns exec "$host"
      limit "$1" "${name}v${host##*h}" env
    done
    ;;
  run)
    ranks=$1 list=''
    shift
    for host in $(hosts); do list+="${list:+,}$subnet.$((${host##*h} + 1)):$ranks"; done
    # Names of their own keep the hosts, which share this machine's folders, out of each other's shared memory.
    PMIX_MCA_gds="hash" on 0 mpirun --allow-run-as-root --bind-to none -H "$list" \
      --mca plm_rsh_agent "$(realpath "$0") agent $name" --mca oob_tcp_if_include $subnet.0/24 \
      --mca btl tcp,vader,self --mca btl_tcp_if_include $subnet.0/24 --mca mpi_yield_when_idle 1 "$@"
    ;;
  agent) # mpirun's way to a host: ADDRESS COMMAND...
    host=$((${1##*.} - 1))
    shift
    on "$host" bash -c "$*"
    ;;
  down)
    for host in $(hosts); do ip netns delete "$host"; done
    if ip link show "${name}b" &>/dev/null; then ip link delete "${name}b"; fi
    ;;
  *)
    echo "cluster.sh: no action is called '$action'" >&2
    exit 1
    ;;
esac
