#!/bin/bash
# Prepares a project of Google Cloud for gce.yaml and the provisioner; docs/gce.md explains it.
# Run it wherever gcloud works, as often as you like: it makes only what is not there.
#   bash gce-setup.sh PROJECT [REGION...]
set -euo pipefail
project=${1:?"usage: gce-setup.sh PROJECT [REGION...]"}
shift
regions=("$@")
[ ${#regions[@]} -gt 0 ] || regions=(us-east5)
head=ray-autoscaler-sa-v1@$project.iam.gserviceaccount.com # the account that ray up gives to the head
hosts=iris-hosts@$project.iam.gserviceaccount.com

g() { gcloud --project="$project" --quiet "$@"; }
missing() { ! g "$@" > /dev/null 2>&1; }
grant() { # ACCOUNT ROLE...
  for role in "${@:2}"; do
    g projects add-iam-policy-binding "$project" --member="serviceAccount:$1" --role="$role" --condition=None > /dev/null
  done
}

g services enable compute.googleapis.com tpu.googleapis.com iam.googleapis.com cloudresourcemanager.googleapis.com \
  artifactregistry.googleapis.com

# The network: hosts have no address on the internet, so images come by Private Google Access, all else by NAT.
if missing compute networks describe iris; then
  g compute networks create iris --subnet-mode=custom --mtu=8896
fi
if missing compute firewall-rules describe iris-inside; then # Ray uses ports of the whole range
  g compute firewall-rules create iris-inside --network=iris --allow=tcp,udp,icmp --source-ranges=10.0.0.0/8
fi
if missing compute firewall-rules describe iris-ssh; then # ray up connects by ssh; restrict this to your addresses
  g compute firewall-rules create iris-ssh --network=iris --allow=tcp:22 --source-ranges="${SSH_FROM:-0.0.0.0/0}"
fi
number=0
for region in "${regions[@]}"; do
  if missing compute networks subnets describe iris --region="$region"; then
    g compute networks subnets create iris --network=iris --region="$region" --range="10.$((10 + number)).0.0/16" \
      --enable-private-ip-google-access
  fi
  if missing compute routers describe iris --region="$region"; then
    g compute routers create iris --network=iris --region="$region"
  fi
  if missing compute routers nats describe iris --router=iris --region="$region"; then
    g compute routers nats create iris --router=iris --region="$region" --auto-allocate-nat-external-ips \
      --nat-all-subnet-ip-ranges
  fi
  number=$((number + 1))
done

# The accounts. ray up grants the head no role for TPUs unless its file has a TPU type.
if missing iam service-accounts describe "$head"; then
  g iam service-accounts create ray-autoscaler-sa-v1 --display-name="Ray's head"
fi
if missing iam service-accounts describe "$hosts"; then
  g iam service-accounts create iris-hosts --display-name="iris_ray's TPU hosts"
fi
grant "$head" roles/tpu.admin roles/compute.instanceAdmin.v1 roles/iam.serviceAccountUser roles/artifactregistry.reader
grant "$hosts" roles/artifactregistry.reader roles/storage.objectUser roles/logging.logWriter

if missing artifacts repositories describe images --location="${regions[0]}"; then
  g artifacts repositories create images --location="${regions[0]}" --repository-format=docker
fi
echo "$project is ready. Images go to ${regions[0]}-docker.pkg.dev/$project/images"
