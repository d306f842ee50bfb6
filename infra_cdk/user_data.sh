# Below the values that infra_cdk/hosts.py puts in front: what a Docker host runs once, at its first start.
set -euo pipefail
dnf install -y -q docker nftables jq
systemctl enable --now docker
install -d -m 700 "$DATA" /etc/sandfleet
printf '%s\n' "$HOST_ENVIRONMENT" >/etc/sandfleet/host.env
printf '%s\n' "$EXECUTOR_ENVIRONMENT" >/etc/sandfleet/executor.env
chmod 600 /etc/sandfleet/*.env

# Secret variables of the graphs: read at each start of the executor, never on a command line.
cat >/etc/sandfleet/secrets.sh <<END
#!/bin/bash
set -euo pipefail
umask 077
: >/run/sandfleet-secrets.env
jq -r 'to_entries[] | [.key, .value] | @tsv' <<<'$SECRETS' | while IFS=\$'\t' read -r name source; do
  secret=\${source%:*} key=\${source##*:}
  value=\$(aws secretsmanager get-secret-value --region '$REGION' --secret-id "\$secret" --query SecretString --output text | jq -r --arg key "\$key" '.[\$key]')
  printf '%s=%s\n' "\$name" "\$value" >>/run/sandfleet-secrets.env
done
END

# Images come from the deployment's own registry, whose password is good for twelve hours: log in before each pull.
cat >/etc/sandfleet/pull.sh <<END
#!/bin/bash
set -euo pipefail
registry=\${1%%/*}
case \$registry in
  *.dkr.ecr.*) aws ecr get-login-password --region '$REGION' | docker login --username AWS --password-stdin "\$registry" ;;
esac
docker image inspect "\$1" >/dev/null 2>&1 || docker pull -q "\$1"
END

# The machine's own word that it is to go: a lifecycle state, or a Spot notice. Executor first, so that its runs are handed
# over while their sandboxes stand; then the daemon, which keeps their workspaces.
cat >/etc/sandfleet/drain.sh <<END
#!/bin/bash
set -uo pipefail
base=http://169.254.169.254/latest
read_metadata() { curl -sf -H "X-aws-ec2-metadata-token: \$token" "\$base/meta-data/\$1"; }
while sleep 5; do
  token=\$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "\$base/api/token") || continue
  state=\$(read_metadata autoscaling/target-lifecycle-state || true)
  if [ "\$state" = Terminated ] || read_metadata spot/instance-action >/dev/null; then
    systemctl stop sandfleet-executor
    systemctl stop sandfleet-host
    id=\$(read_metadata instance-id)
    group=\$(aws autoscaling describe-auto-scaling-instances --region '$REGION' --instance-ids "\$id" --query 'AutoScalingInstances[0].AutoScalingGroupName' --output text)
    aws autoscaling complete-lifecycle-action --region '$REGION' --lifecycle-hook-name drain --auto-scaling-group-name "\$group" --instance-id "\$id" --lifecycle-action-result CONTINUE
    exit 0
  fi
done
END
chmod 700 /etc/sandfleet/*.sh

LOGS="--log-driver awslogs --log-opt awslogs-region=$REGION --log-opt awslogs-group=$LOG_GROUP"
token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token)
# The scaler knows hosts by this name.
INSTANCE=$(curl -sf -H "X-aws-ec2-metadata-token: $token" http://169.254.169.254/latest/meta-data/instance-id)

# The daemon works on the machine itself: its engine, its packet filter, its control groups. It is the only part that does.
# In a namespace of its own it would read paths of control groups that are not those below /sys/fs/cgroup.
cat >/etc/systemd/system/sandfleet-host.service <<END
[Unit]
Description=sandfleet sandbox host
Requires=docker.service
After=docker.service network-online.target
StartLimitIntervalSec=0
[Service]
ExecStartPre=/etc/sandfleet/pull.sh $HOST_IMAGE
ExecStartPre=-/usr/bin/docker rm -f sandfleet-host
ExecStartPre=/usr/bin/docker run --rm -v /var/run/docker.sock:/var/run/docker.sock --entrypoint python3 $HOST_IMAGE -P -m sandfleet.fleet.host.base_image --from $SANDBOX_BASE
ExecStart=/usr/bin/docker run --name sandfleet-host --privileged --network host --pid host --cgroupns host --env-file /etc/sandfleet/host.env -e SANDFLEET_HOST_ID=$INSTANCE -e SANDFLEET_HOST_DIR=$DATA/host -e SANDFLEET_HOST_SOCKET=$DATA/host.sock -e SANDFLEET_HOST_LISTEN=0.0.0.0:$HOST_PORT -v /var/run/docker.sock:/var/run/docker.sock -v $DATA:$DATA -v /sys/fs/cgroup:/sys/fs/cgroup $LOGS --log-opt awslogs-stream=host-$INSTANCE $HOST_IMAGE
ExecStop=/usr/bin/docker stop -t $HOST_STOP_S sandfleet-host
TimeoutStopSec=$((HOST_STOP_S + 10))
Restart=always
RestartSec=1
[Install]
WantedBy=multi-user.target
END

cat >/etc/systemd/system/sandfleet-executor.service <<END
[Unit]
Description=sandfleet executor
Requires=docker.service
After=sandfleet-host.service
StartLimitIntervalSec=0
[Service]
ExecStartPre=/etc/sandfleet/pull.sh $EXECUTOR_IMAGE
ExecStartPre=/etc/sandfleet/secrets.sh
ExecStartPre=-/usr/bin/docker rm -f sandfleet-executor
ExecStart=/usr/bin/docker run --name sandfleet-executor --network host --read-only --tmpfs /tmp --cap-drop ALL --user 0 --security-opt no-new-privileges --env-file /etc/sandfleet/executor.env --env-file /run/sandfleet-secrets.env -e SANDFLEET_HOST_ID=$INSTANCE -e SANDFLEET_HOST_SOCKET=$DATA/host.sock -v $DATA:$DATA $LOGS --log-opt awslogs-stream=executor-$INSTANCE $EXECUTOR_IMAGE
ExecStop=/usr/bin/docker stop -t $EXECUTOR_STOP_S sandfleet-executor
TimeoutStopSec=$((EXECUTOR_STOP_S + 10))
Restart=always
RestartSec=1
[Install]
WantedBy=multi-user.target
END

cat >/etc/systemd/system/sandfleet-drain.service <<END
[Unit]
Description=sandfleet drains before this machine goes
After=network-online.target
[Service]
ExecStart=/etc/sandfleet/drain.sh
Restart=on-failure
[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --now sandfleet-host sandfleet-executor sandfleet-drain
