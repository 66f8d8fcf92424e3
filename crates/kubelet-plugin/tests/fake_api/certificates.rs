//! The certificates of an API server and of the kubelet, which replaces its own from time to time.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SerialNumber};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

pub struct Certificates {
    dir: PathBuf,
    ca: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    node: String,
    address: SocketAddr,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificates")
            .field("dir", &self.dir)
            .finish_non_exhaustive()
    }
}

impl Certificates {
    /// Writes a kubeconfig file that names the kubelet's current certificate, as kubeadm does.
    pub fn write(dir: &Path, address: SocketAddr, node: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let ca = params.self_signed(&key).unwrap();
        fs::write(dir.join("ca.crt"), ca.pem()).unwrap();
        let current = dir.join("kubelet-client-current.pem");
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: default\n\
             clusters:\n- name: default\n  cluster:\n    server: https://{address}\n    certificate-authority: {ca}\n\
             users:\n- name: default-auth\n  user:\n    client-certificate: {current}\n    client-key: {current}\n\
             contexts:\n- name: default\n  context: {{cluster: default, user: default-auth}}\n",
            ca = dir.join("ca.crt").display(),
            current = current.display(),
        );
        fs::write(dir.join("kubelet.conf"), kubeconfig).unwrap();
        let issuer = Issuer::new(params, key);
        let this = Self {
            dir: dir.to_owned(),
            ca: ca.der().clone(),
            issuer,
            node: node.to_owned(),
            address,
        };
        this.rotate(1);
        this
    }

    /// Gives the kubelet a certificate with this serial number, in the place of the one before.
    pub fn rotate(&self, serial: u8) {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params
            .distinguished_name
            .push(DnType::OrganizationName, "system:nodes");
        params
            .distinguished_name
            .push(DnType::CommonName, format!("system:node:{}", self.node));
        params.serial_number = Some(SerialNumber::from_slice(&[serial]));
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = self.dir.join(format!("kubelet-client-{serial}.pem"));
        fs::write(&file, certificate.pem() + &key.serialize_pem()).unwrap();
        let new = self.dir.join("new");
        symlink(&file, &new).unwrap();
        fs::rename(new, self.dir.join("kubelet-client-current.pem")).unwrap();
    }

    pub fn server(&self) -> Arc<ServerConfig> {
        let params = CertificateParams::new(vec![self.address.ip().to_string()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.clone()).unwrap();
        let clients = WebPkiClientVerifier::builder(Arc::new(roots))
            .build()
            .unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder().with_client_cert_verifier(clients);
        Arc::new(
            config
                .with_single_cert(vec![certificate.der().clone()], key)
                .unwrap(),
        )
    }
}

/// The serial number of a certificate: the first integer after its version.
pub fn serial(der: &[u8]) -> Vec<u8> {
    // [0] EXPLICIT version 2, then INTEGER serialNumber
    let version = [0xa0, 3, 2, 1, 2, 2];
    let at = der
        .windows(version.len())
        .position(|window| window == version)
        .unwrap()
        + version.len();
    let length = usize::from(der[at]);
    der[at + 1..at + 1 + length].to_vec()
}
